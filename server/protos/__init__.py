"""The wire formats: .proto files and what `make proto` generates from them. Never edited by hand."""
