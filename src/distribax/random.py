"""Random keys and numbers that differ by replica, and repeat by seed."""

from distribax.training.random_keys import Generator as Generator
from distribax.training.random_keys import replica_key as replica_key
