"""Fans: curve, policies, control loop, outputs, and the daemon's configuration."""
