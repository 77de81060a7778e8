"""File formats: how records are found in files and written to them."""
