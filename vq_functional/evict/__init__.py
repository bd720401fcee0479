"""Methods that keep some rows: one engine, many policies."""
