"""The contract between SGLang's HiCache and L3 storage backends, for hybrid models."""
