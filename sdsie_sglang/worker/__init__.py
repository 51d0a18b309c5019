"""The speculative worker: executes gears in SGLang's scheduler process."""
