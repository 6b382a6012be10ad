"""The tables and figures of the edge-cloud paper (IMWUT 2021), beside ours."""
