"""The measured programs, one a file, each run as a process in its library's environment."""
