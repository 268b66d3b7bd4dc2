"""Hidden states of large language models, captured for EAGLE-3 training. See ARCHITECTURE.md."""

__version__ = "0.1.0"
