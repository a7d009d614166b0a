// Keeps the libraries loadable on glibc 2.28 (manylinux_2_28).
//
// std::shared_ptr, which torch's stable Tensor is made of, asks __libc_single_threaded whether it
// may skip its atomics. The variable is glibc 2.32's; this hidden one answers "threads may be
// running", so that the library does not ask the system for it. It can go when manylinux_2_28 is
// history.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}
