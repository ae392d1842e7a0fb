"""Which steps? One file per algorithm; each only says how a sum is planned."""
