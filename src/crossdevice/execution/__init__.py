"""Steps meet arrays: values are read and checked, plans are run, results are wrapped."""
