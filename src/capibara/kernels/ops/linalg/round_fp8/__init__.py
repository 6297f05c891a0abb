"""A matrix rounded to fp8, as it is and transposed."""
