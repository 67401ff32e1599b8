"""What people see of storage nodes and runs: the status, the dashboard's page, and the doctor."""
