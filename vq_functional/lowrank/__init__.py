"""Methods that hold rows in few principal directions."""
