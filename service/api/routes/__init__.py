"""Routes by what they are about. They translate between HTTP and the rest, and decide nothing."""
