"""The program that the user exported: its model, module scopes, source lines and names."""
