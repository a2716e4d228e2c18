"""lpfs: which feature fields does a CTR model really need?"""

__version__ = "0.1.0"
