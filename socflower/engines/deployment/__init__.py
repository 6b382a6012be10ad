"""Engine `deployment`: SuperLink, SuperNodes and the cloud as processes, and runs on a remote SuperLink."""
