from hypothesis import settings

# Seeds are fixed, and a slow moment of the machine is no failure.
settings.register_profile("layout", derandomize=True, deadline=None, max_examples=100)
settings.load_profile("layout")
