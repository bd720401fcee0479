"""Methods that hold rotated directions as codebook indices or signs."""
