"""The client's commands, one a module; `tenuto_client._command` finds and runs them."""
