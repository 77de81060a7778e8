"""Memory that a server and clients on the same machine share."""
