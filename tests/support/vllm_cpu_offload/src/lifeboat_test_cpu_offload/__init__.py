"""Test only: vLLM's native KV offloading on a machine without an accelerator."""
