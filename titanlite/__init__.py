"""titanlite: one TOML declares an LLM pretraining run; the parallel layout never changes its result."""

__version__ = "0.1.0"
