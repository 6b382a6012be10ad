"""Features in few bits on the wire: quantisation, error feedback, delta coding (F24, F25)."""
