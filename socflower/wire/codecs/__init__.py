"""Codecs of tensors for the wire and for state, in NumPy: quantisation, largest values, delta coding, feedback."""
