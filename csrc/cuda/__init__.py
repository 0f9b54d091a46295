"""The CUDA sources, installed as ddpcomm.kernels.cuda, so that they are found at run time and compiled for the GPU at hand."""
