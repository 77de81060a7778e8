"""A process's access to the parameters on all servers."""
