"""Test only: SGLang's hierarchical cache on a machine without an accelerator."""
