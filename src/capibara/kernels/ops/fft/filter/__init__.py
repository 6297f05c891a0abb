"""A product of spectra between a transform and the transform back, as one op."""
