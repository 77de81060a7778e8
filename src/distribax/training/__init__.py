"""Training: gradients of variables, optimizers, losses and metrics."""
