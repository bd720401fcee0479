"""Methods of several stages."""
