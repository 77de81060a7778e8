"""The steps of a data set, as functions of it: `Dataset` has them as its methods."""
