"""How a state becomes arrays, chunks, stripes and a manifest, and back. Pure: no I/O, no clock."""
