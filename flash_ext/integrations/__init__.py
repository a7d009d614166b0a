"""flash_ext inside other libraries: one module for each, none imported by `import flash_ext`."""
