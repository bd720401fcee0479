"""Methods that hold numbers in affine groups."""
