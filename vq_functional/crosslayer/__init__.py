"""Methods that hold the rows of several layers together."""
