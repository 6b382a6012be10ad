"""Clients of split training: edges whose cloud half is in the same process or on a remote machine."""
