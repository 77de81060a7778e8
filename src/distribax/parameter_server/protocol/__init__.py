"""What travels between clients and servers, and how: specs, operations, messages, sockets."""
