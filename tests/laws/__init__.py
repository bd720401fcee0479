"""The laws: one a file, each run over every method of the table and over compositions."""
