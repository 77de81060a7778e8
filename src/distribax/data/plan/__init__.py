"""The logical plan of a data set: what is to be done, as immutable nodes."""
