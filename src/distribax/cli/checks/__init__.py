"""What `distribax doctor` examines: one file per topic, each a function that yields findings."""
