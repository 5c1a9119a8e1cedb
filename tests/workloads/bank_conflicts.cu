// Shared-memory loads with a known number of bank conflicts: nvcc -O2 -o bank_conflicts bank_conflicts.cu
//   ./bank_conflicts SECONDS STRIDE
// A warp's 32 threads read words STRIDE apart: with stride 32 all lie in one bank, and each load takes 31 more passes.
// Prints one JSON line: loads of warps, the conflicts that makes, and when (CLOCK_MONOTONIC ns).
#include <cstdio>
#include <cstdlib>
#include <ctime>

__global__ void loads(int stride, int rounds, float *out) {
    __shared__ volatile float words[1024];
    for (int n = threadIdx.x; n < 1024; n += blockDim.x) words[n] = n;
    __syncthreads();
    float sum = 0;
    int at = (threadIdx.x % 32 * stride) % 1024;
    for (int n = 0; n < rounds; n++) sum += words[at];
    if (sum == -1) *out = sum;
}

static long long now() { timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1000000000LL + t.tv_nsec; }

int main(int argc, char **argv) {
    double seconds = atof(argv[1]); int stride = atoi(argv[2]);
    const int blocks = 132 * 4, threads = 256, rounds = 20000;
    float *out; cudaMalloc(&out, 4);
    loads<<<blocks, threads>>>(stride, rounds, out); cudaDeviceSynchronize();
    long long begin = now(), launches = 0;
    while (now() - begin < seconds * 1e9) { loads<<<blocks, threads>>>(stride, rounds, out); cudaDeviceSynchronize(); launches++; }
    long long end = now(); double warps = (double)launches * blocks * threads / 32 * rounds;
    printf("{\"stride\": %d, \"t\": [%lld, %lld], \"warp_loads\": %.0f, \"conflicts\": %.0f}\n", stride, begin, end, warps, warps * (stride % 32 ? 0 : 31));
    return 0;
}
