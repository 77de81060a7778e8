"""Older interfaces, kept so that code moves by changing imports."""

from distribax.contrib import distribute as distribute
