"""The methods of a data set, as functions by topic: `Dataset` takes them into its body."""
