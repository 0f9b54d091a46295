/* A libnccl that does nothing but write down what it is given, one line a call. Built by test_nccl_library.py.
   The structure and the signatures are those of nccl.h, NCCL 2.32. */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    size_t size;
    unsigned magic, version;
    int blocking, cga, min_ctas, max_ctas;
    const char* net_name;
    int split_share, traffic_class;
    const char* comm_name;
    int collnet, cta_policy, shrink_share, nvls_ctas, channels, nvlink, graph_usage, rma_ctx, p2p_peers, graph_order, launch_order;
} Config;

typedef struct {
    char internal[128];
} UniqueId;

static void note(const char* format, ...) {
    FILE* log = fopen(getenv("FAKE_NCCL_LOG"), "a");
    __builtin_va_list arguments;
    __builtin_va_start(arguments, format);
    vfprintf(log, format, arguments);
    __builtin_va_end(arguments);
    fputc('\n', log);
    fclose(log);
}

static int state = 7; /* ncclInProgress until asked once */

int ncclGetVersion(int* version) {
    *version = atoi(getenv("FAKE_NCCL_VERSION"));
    return 0;
}

int ncclGetUniqueId(UniqueId* id) {
    memset(id->internal, 'u', sizeof id->internal);
    return 0;
}

const char* ncclGetErrorString(int code) { return code == 6 ? "remote error" : "some error"; }
const char* ncclGetLastError(void* comm) { return comm ? "a cable was pulled" : "no communicator"; }

int ncclCommInitRankConfig(void** comm, int ranks, UniqueId id, int rank, Config* c) {
    note("start rank %d of %d, id %c%c, magic %x, blocking %d, min_ctas %s, max_ctas %d, traffic_class %d, net %s, name %s, order %d", rank,
         ranks, id.internal[0], id.internal[127], c->magic, c->blocking, c->min_ctas == INT_MIN ? "unset" : "set", c->max_ctas,
         c->traffic_class, c->net_name, c->comm_name, c->launch_order);
    *comm = (void*)0xc0ffee;
    return 7;
}

int ncclCommGetAsyncError(void* comm, int* code) {
    *code = state;
    state = 0;
    return 0;
}

int ncclAllReduce(const void* in, void* out, size_t count, int dtype, int op, void* comm, void* stream) {
    note("all_reduce %s, %zu of type %d, op %d, comm %p, stream %p", in == out ? "in place" : "apart", count, dtype, op, comm, stream);
    return 7;
}

int ncclBroadcast(const void* in, void* out, size_t count, int dtype, int root, void* comm, void* stream) {
    note("broadcast %s, %zu of type %d from %d, stream %p", in == out ? "in place" : "apart", count, dtype, root, stream);
    return 0;
}

int ncclAllGather(const void* in, void* out, size_t count, int dtype, void* comm, void* stream) {
    note("all_gather %zu of type %d, from %d to %d, stream %p", count, dtype, *(const int*)in, *(int*)out, stream);
    return 0;
}

int ncclReduceScatter(const void* in, void* out, size_t count, int dtype, int op, void* comm, void* stream) {
    note("reduce_scatter %zu of type %d, op %d, from %d to %d, stream %p", count, dtype, op, *(const int*)in, *(int*)out, stream);
    return 0;
}

int ncclRedOpCreatePreMulSum(int* op, void* scalar, int dtype, int residence, void* comm) {
    note("scaled sum by %g, type %d, residence %d", dtype == 8 ? *(double*)scalar : *(float*)scalar, dtype, residence);
    *op = 512;
    return 0;
}

int ncclRedOpDestroy(int op, void* comm) {
    note("destroy op %d", op);
    return 0;
}

int ncclMemAlloc(void** pointer, size_t size) {
    note("allocate %zu", size);
    *pointer = (void*)0x1000;
    return 0;
}

int ncclMemFree(void* pointer) {
    note("free %p", pointer);
    return 0;
}

int ncclCommRegister(void* comm, void* pointer, size_t size, void** handle) {
    note("register %p, %zu", pointer, size);
    *handle = getenv("FAKE_NCCL_NO_REGISTER") ? NULL : (void*)0xaa;
    return 0;
}

int ncclCommDeregister(void* comm, void* handle) {
    note("deregister %p", handle);
    return 0;
}

int ncclCommFinalize(void* comm) {
    note("finalize");
    return 6;
}

int ncclCommDestroy(void* comm) {
    note("destroy %p", comm);
    return 0;
}

int ncclCommAbort(void* comm) {
    note("abort %p", comm);
    return 0;
}

#ifndef OLD /* what libnccl 2.21 doesn't have */
int ncclCommWindowRegister(void* comm, void* pointer, size_t size, void** window, int flags) {
    note("window %p, %zu, flags %d", pointer, size, flags);
    *window = getenv("FAKE_NCCL_NO_REGISTER") ? NULL : (void*)0xbb;
    return 7;
}

int ncclCommWindowDeregister(void* comm, void* window) {
    note("close window %p", window);
    return 0;
}

int ncclCommShrink(void* comm, int* excluded, int count, void** child, Config* c, int flags) {
    note("shrink without %d ranks, the first %d, max_ctas %d, flags %d", count, excluded[0], c->max_ctas, flags);
    *child = (void*)0xdad;
    return 7;
}

int ncclCommRevoke(void* comm, int flags) {
    note("revoke %d", flags);
    return 7;
}

int ncclCommMemStats(void* comm, int which, unsigned long long* value) {
    *value = 100 + which;
    return 0;
}
#endif
