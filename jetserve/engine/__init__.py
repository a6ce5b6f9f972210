"""From requests to tokens: state, pages, sampling, device programs, executor, scheduler."""
