"""Engine `local`: a Flower Grid without Ray, in virtual time, with worker processes."""
