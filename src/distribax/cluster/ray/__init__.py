"""Ray as the engine of parameter-server training: nodes, token, server processes."""
