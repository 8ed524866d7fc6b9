{{- /* What the operator's pod and that of `helm test` have in common. */ -}}
{{- define "concertina.environment" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: CONCERTINA_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- name: CONCERTINA_LEASE
  value: {{ include "concertina.lease" . }}
- name: CONCERTINA_MASTER_KEY_SECRET
  value: {{ include "concertina.masterKeySecret" . }}
- name: CONCERTINA_MASTER_KEY_CREATE
  value: {{ empty .Values.masterKey.existingSecret | quote }}
- name: CONCERTINA_IMAGE_AGENT
  value: {{ include "concertina.image" (list .Values.agentImage .Chart.AppVersion) | quote }}
- name: CONCERTINA_IMAGE_AGENT_PULL_POLICY
  value: {{ .Values.agentImage.pullPolicy | quote }}
- name: CONCERTINA_WATCH_NAMESPACES
  value: {{ join "," .Values.watchNamespaces | quote }}
- name: CONCERTINA_NAMESPACE_SELECTOR
  value: {{ .Values.namespaceSelector | quote }}
- name: CONCERTINA_WATCH_NODES
  value: {{ .Values.nodes.enabled | quote }}
{{- if not (kindIs "invalid" .Values.noticeTaints) }}
- name: CONCERTINA_NOTICE_TAINTS
  value: {{ join "," .Values.noticeTaints | quote }}
{{- end }}
{{- if not (kindIs "invalid" .Values.faultConditions) }}
- name: CONCERTINA_FAULT_CONDITIONS
  value: {{ join "," .Values.faultConditions | quote }}
{{- end }}
- name: CONCERTINA_HEALTH
  value: $(POD_IP):8080
- name: CONCERTINA_METRICS
  value: $(POD_IP):8090
- name: CONCERTINA_METRICS_ACCESS
  value: {{ include "concertina.metricsAccess" . }}
{{- with .Values.metrics.tokenSecret }}
- name: CONCERTINA_METRICS_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: token}}
{{- end }}
- name: CONCERTINA_POD_METRICS
  value: {{ .Values.metrics.pods.port | quote }}
- name: CONCERTINA_POD_METRICS_ANNOTATIONS
  value: {{ eq .Values.metrics.discovery "Annotations" | quote }}
- name: CONCERTINA_POD_METRICS_TOKEN_SECRET
  value: {{ .Values.metrics.pods.tokenSecret | quote }}
{{- with .Values.tracing.endpoint }}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ . | quote }}
{{- with $.Values.tracing.headersSecret }}
- name: OTEL_EXPORTER_OTLP_HEADERS
  valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: headers}}
{{- end }}
{{- end }}
- name: CONCERTINA_LOG_LEVEL
  value: {{ .Values.logLevel }}
- name: CONCERTINA_LOG_FORMAT
  value: {{ .Values.logFormat }}
{{- with .Values.extraEnv }}
{{- toYaml . | nindent 0 }}
{{- end }}
{{- end -}}

{{- define "concertina.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "concertina.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- /* Where pods run, and the Secrets with which their image is pulled there. */ -}}
{{- define "concertina.placement" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}
