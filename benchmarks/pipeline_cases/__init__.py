"""Problems that planners of pipelines are measured with, and the best plans of small ones by brute force."""
