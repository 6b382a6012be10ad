"""Heat in virtual time: the rack as a thermal network, clock governor, background load (F19-F21)."""
