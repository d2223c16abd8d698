"""Language models: a decoder in torch, its export to a ``.pte``, and generation from one."""
