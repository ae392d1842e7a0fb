"""`crossdevice bench`: collectives measured as nccl-tests does, alone or beside other libraries."""
