"""Long causal filters in bfloat16, and the filters' gradient, as ops: what `fft_convolve` is made of there."""
